# The image of Octavo's server. deploy/image.sh builds it and tries what docs/deploy.md says of it.
#   docker build -t octavo .                                       for CPUs
#   docker build -t octavo:cuda --build-arg VARIANT=cuda .         for NVIDIA GPUs
#   docker build -t octavo:smollm2 --build-arg MODELS=smollm2 .    with a model inside
# A digest in place of the tag fixes the base for good: --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:...
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

# ---- The packages, and ours among them, in a virtual environment that the last stage takes over whole.
FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /build

# The native CPU kernels are compiled here, once for each instruction set; the server chooses when it starts.
# Debian's archive keeps no version but the newest, so that a pinned one would soon not be found.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

# Without pip in it: a server installs nothing.
RUN python3 -m venv --without-pip /opt/octavo

COPY pyproject.toml deploy/image/requirements.py deploy/image/constraints.txt deploy/image/trim_packages.py ./
ARG VARIANT=cpu
# auto: PyTorch's own index of CPU builds, or for CUDA none, since PyPI's build is for CUDA. Empty: pip's settings alone.
ARG TORCH_INDEX_URL=auto
RUN python3 requirements.py "${VARIANT}" > requirements.txt \
 && case "${VARIANT}:${TORCH_INDEX_URL}" in \
      cpu:auto) index=https://download.pytorch.org/whl/cpu ;; \
      cuda:auto) index= ;; \
      *) index="${TORCH_INDEX_URL}" ;; \
    esac \
 && python3 -m pip --python /opt/octavo/bin/python install --no-cache-dir --only-binary :all: \
      ${index:+--extra-index-url "${index}"} --constraint constraints.txt --requirement requirements.txt \
 && /opt/octavo/bin/python -c "import sys, torch; found = 'cuda' if torch.version.cuda else 'cpu'; \
      sys.exit(found != '${VARIANT}' and f'pip found torch for {found}, not ${VARIANT}: see TORCH_INDEX_URL.')" \
 && python3 trim_packages.py /opt/octavo/lib/python3.*/site-packages

# The build's own tool comes from the same list of versions, and stays in this stage.
RUN python3 -m pip install --no-cache-dir --only-binary :all: --constraint constraints.txt setuptools

COPY LICENSE README.md setup.py ./
COPY kernels kernels
COPY models models
COPY paged_cache paged_cache
COPY scheduler scheduler
COPY server server
# Elsewhere the native kernels are optional; an image without them would be slow, and nobody would know why.
RUN python3 -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir wheels . \
 && python3 -m pip --python /opt/octavo/bin/python install --no-cache-dir --no-deps wheels/octavo-*.whl \
 && test -f /opt/octavo/lib/python3.*/site-packages/kernels/cpu/_paged_attention.so \
 && /opt/octavo/bin/octavo --version

COPY deploy/healthcheck.py /opt/octavo/healthcheck.py

# ---- Models that the image brings along: known names, with spaces between them; none by default.
FROM build AS models
ARG MODELS=""
# With this stage's own Python, which has pip, so that the builder's mirrors and certificates count.
RUN mkdir -p /opt/octavo/share/octavo \
 && for model in ${MODELS}; do \
      PYTHONPATH="$(echo /opt/octavo/lib/python3.*/site-packages)" \
        python3 -m server.cli pull "${model}" --home /opt/octavo/share/octavo; \
    done \
 && find /opt/octavo/share/octavo -name .lock -delete

# ---- What runs.
FROM ${PYTHON_IMAGE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

ARG VARIANT=cpu
# Process 1 gets no signal that it does not ask for, and Python asks only once it has begun: tini passes them on. Triton
# compiles a launcher for each kernel with the machine's C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini \
 && if [ "${VARIANT}" = cuda ]; then apt-get install --yes --no-install-recommends gcc libc6-dev; fi \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
 && groupadd --gid 10001 octavo \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin octavo \
 && install -d -o 10001 -g 0 -m 0775 /cache

COPY --from=models /opt/octavo /opt/octavo

# The cache is all that is written to. The NVIDIA variables ask the container runtime for the cards and their driver.
ENV PATH=/opt/octavo/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    OCTAVO_HOME=/cache/octavo \
    OCTAVO_HOST=0.0.0.0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

LABEL org.opencontainers.image.title="octavo" \
      org.opencontainers.image.description="An LLM serving server on a paged KV cache" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"

WORKDIR /opt/octavo
VOLUME ["/cache"]
EXPOSE 8000
# A number, so that Kubernetes can tell that it is not root.
USER 10001:10001
# The first SIGTERM lets running requests finish, for up to --shutdown-timeout: give `docker stop` longer than that.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
  CMD ["/opt/octavo/bin/python", "-I", "/opt/octavo/healthcheck.py"]
# 143 is an end by SIGTERM before the server has begun, which is what was wanted.
ENTRYPOINT ["tini", "-e", "143", "--", "octavo", "serve"]
