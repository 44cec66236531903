# syntax=docker/dockerfile:1
# Three images: `docker build --target cpu -t manylora .`, `--target cuda -t manylora:cuda`, and `--target route` for a
# router, without torch (docs/deploying.md).
#
# Layers lie in the order in which they change: the system, libraries (of pyproject.toml alone), manylora. An image has no
# compiler, runs as user 10001, and writes below /cache, /state and /tmp only: its root may be read-only.

ARG PYTHON=3.12-slim-trixie

FROM python:${PYTHON} AS base
ENV PATH=/opt/manylora/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HF_HOME=/cache/huggingface \
    NUMBA_CACHE_DIR=/cache/numba \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home manylora \
 && install -d -o 10001 -g 10001 /cache /state
WORKDIR /home/manylora
EXPOSE 8000
# Of a server, a router or functions without TLS. Another port or TLS needs a check of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The first process reaps orphans and passes SIGTERM on: manylora then drains (--drain-timeout).
ENTRYPOINT ["tini", "--", "manylora"]

# -- what to install ----------------------------------------------------------------------------------------------------

FROM base AS requirements
WORKDIR /src
COPY pyproject.toml deploy/image/requirements.py ./
COPY packages/light/pyproject.toml light.toml
RUN python requirements.py pyproject.toml cpu gguf grammar otel stores > /cpu.txt \
 && python requirements.py pyproject.toml gguf grammar otel stores > /cuda.txt \
 && python requirements.py light.toml otel route > /route.txt

FROM base AS wheels
WORKDIR /src
COPY pyproject.toml LICENSE ./
COPY packages packages
COPY src src
RUN pip wheel --no-deps --wheel-dir /wheels/whole . && pip wheel --no-deps --wheel-dir /wheels/light ./packages/light

FROM base AS cpu-libraries
RUN python -m venv /opt/manylora \
 && pip install "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
COPY --from=requirements /cpu.txt /
RUN pip install -r /cpu.txt

FROM base AS cuda-libraries
RUN python -m venv /opt/manylora
COPY --from=requirements /cuda.txt /
RUN pip install -r /cuda.txt

# Triton compiles one file of C at the first start of a GPU. It is compiled here, for its cache, and needs no GPU.
FROM cuda-libraries AS launcher
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY deploy/image/triton_launcher.py /
RUN python /triton_launcher.py

FROM base AS route-libraries
RUN python -m venv /opt/manylora
COPY --from=requirements /route.txt /
RUN pip install -r /route.txt

# -- images -------------------------------------------------------------------------------------------------------------

FROM base AS route
COPY --from=route-libraries /opt/manylora /opt/manylora
RUN --mount=type=bind,from=wheels,source=/wheels/light,target=/wheels pip install --no-deps /wheels/*.whl
USER 10001:10001
CMD ["route", "--help"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-libraries /opt/manylora /opt/manylora
COPY --from=launcher --chown=10001:10001 /cache/triton /cache/triton
RUN --mount=type=bind,from=wheels,source=/wheels/whole,target=/wheels pip install --no-deps /wheels/*.whl
USER 10001:10001
CMD ["serve", "demo", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS cpu
COPY --from=cpu-libraries /opt/manylora /opt/manylora
RUN --mount=type=bind,from=wheels,source=/wheels/whole,target=/wheels pip install --no-deps /wheels/*.whl
USER 10001:10001
CMD ["serve", "demo", "--host", "0.0.0.0", "--port", "8000"]
