"""The gateway's own endpoints: health, models, metrics, explain, the admin API and the live page."""
