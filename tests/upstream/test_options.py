from kvroute.upstream.options import UpstreamOptions


def test_a_stream_may_be_silent_for_half_an_hour():
    assert UpstreamOptions().idle_timeout_s > 1800
