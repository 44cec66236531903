# Two images, as stages: `docker build --target cpu -t manylora .` and `docker build --target cuda -t manylora:cuda .`
# The server runs as an ordinary user; models and adapters are mounted, read-only.

FROM python:3.12-slim AS cpu
RUN pip install --no-cache-dir "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml LICENSE /src/
COPY packages/description.md /src/packages/
COPY src /src/src
RUN pip install --no-cache-dir "/src[cpu,gguf,grammar]" && rm -rf /src && useradd --create-home --uid 10001 manylora
USER manylora
WORKDIR /home/manylora
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["manylora"]
CMD ["serve", "demo", "--host", "0.0.0.0", "--port", "8000"]

FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv gcc python3-dev \
  && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/manylora
ENV PATH=/opt/manylora/bin:$PATH
COPY pyproject.toml LICENSE /src/
COPY packages/description.md /src/packages/
COPY src /src/src
RUN pip install --no-cache-dir "/src[gguf,grammar]" && rm -rf /src && useradd --create-home --uid 10001 manylora
USER manylora
WORKDIR /home/manylora
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["manylora"]
CMD ["serve", "demo", "--host", "0.0.0.0", "--port", "8000"]
