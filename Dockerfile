# The gateway alone: `coterie serve`, the endpoint picker included. Traces, figures and calibration are for a workstation.
#
#   docker build -t coterie .
#   docker run -p 8000:8000 -v ./gateway:/etc/coterie:ro coterie        # with gateway.yaml in ./gateway
FROM debian:12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv ca-certificates
COPY pyproject.toml README.md LICENSE NOTICE /source/
COPY LICENSES /source/LICENSES
COPY src /source/src
# pyarrow reads traces and matplotlib draws figures; the gateway does neither, and they are 240 MB.
RUN python3 -m venv /opt/coterie \
    && /opt/coterie/bin/python -m pip install --no-cache-dir --no-compile "/source[gateway,envoy]" \
    && /opt/coterie/bin/python -m pip uninstall -y pyarrow matplotlib pillow fonttools contourpy kiwisolver \
    && /opt/coterie/bin/python -m pip uninstall -y pip setuptools

FROM debian:12-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin coterie \
    && mkdir -p /var/cache/coterie /var/lib/coterie \
    && chown coterie: /var/cache/coterie /var/lib/coterie
COPY --from=build /opt/coterie /opt/coterie
# Loops are compiled for the machine that runs them, at the first start; keep the folder on a volume, and later starts are
# quick.
ENV PATH=/opt/coterie/bin:/usr/bin:/bin NUMBA_CACHE_DIR=/var/cache/coterie PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/coterie
# The gateway; the picker's gRPC.
EXPOSE 8000 9002
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["coterie", "serve"]
CMD ["--config", "/etc/coterie/gateway.yaml"]
