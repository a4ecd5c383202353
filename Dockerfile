# The gateway (and `kvroute sim`) as a small image:
#
#   docker build -t kvroute .
#   docker run -p 8080:8080 kvroute serve --worker http://10.0.0.5:8000 --worker http://10.0.0.6:8000
#   docker run -p 8001:8001 kvroute --service-discovery static ...   # a command line of production-stack's router
#
# Size, uncompressed: base image 125 MB (an assumption: not measured) + dependencies with bytecode 96 MB (the sum that
# tests/deploy/test_dockerfile.py makes, on Python 3.11) = about 220 MB, below the bound of 300 MB.

FROM python:3.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/kvroute
# Requirements are a separate layer, so that a change of the code does not install them again. Only files whose hash is
# in a lock are installed (`make lock`).
COPY requirements.lock requirements-build.lock ./
RUN pip install --require-hashes --only-binary :all: -r requirements-build.lock \
 && pip --python /opt/kvroute/bin/python install --require-hashes --only-binary :all: -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
 && pip --python /opt/kvroute/bin/python install --no-deps --no-index wheels/*.whl
# What the image contains; its Debian packages are those of the base image.
COPY requirements.lock sbom.cdx.json /opt/kvroute/share/kvroute/
# For manifests with `command: ["vllm-router", ...]`, as production-stack's router image has it. Only here: on PyPI the
# name belongs to another project.
RUN printf '#!/bin/sh\nexec kvroute vllm-router "$@"\n' > /opt/kvroute/bin/vllm-router \
 && chmod 0755 /opt/kvroute/bin/vllm-router

FROM python:3.12-slim-bookworm
# The state folder contains the admin key that the gateway makes if none is set.
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin kvroute \
 && install -d -o kvroute -g kvroute -m 0700 /var/lib/kvroute
COPY --from=build /opt/kvroute /opt/kvroute
ENV PATH=/opt/kvroute/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    KVROUTE__SERVER__HOST=0.0.0.0 \
    XDG_STATE_HOME=/var/lib
USER kvroute
EXPOSE 8080
# /health, not /ready: a gateway without a routable worker must not be restarted. The port is that of `--port`, of the
# variable, or the default, which is 8001 for a command line of production-stack's router.
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s --retries=3 \
  CMD ["python", "-c", "import http.client, os, re, sys; line = open('/proc/1/cmdline').read(); ports = re.findall(r'\\0--port[=\\0](\\d+)', line) or [os.environ.get('KVROUTE__SERVER__PORT') or (8001 if re.search(r'\\0--(service-discovery|dynamic-config-(yaml|json))[=\\0]', line) else 8080)]; c = http.client.HTTPConnection('127.0.0.1', int(ports[-1]), timeout=2); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
# In exec form SIGTERM reaches kvroute itself, which drains and exits with 0.
ENTRYPOINT ["kvroute"]
CMD ["serve"]
