# The server as an image, for processors (DEVICE=cpu) or CUDA (DEVICE=cuda):
#
#   docker build --build-arg DEVICE=cuda -t roseinfer:cuda .
#
# It runs as 10001:10001 with a read-only root; /tmp must be writable, and /models keeps what the Hugging Face hub gives.
# A folder of wheels makes the build an offline one: `--build-context wheels=FOLDER`. docs/container.md tells the rest.

# Python's version is the one that constraints.txt was tested with. Any Debian or Ubuntu with python3 and its venv does.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# Replaced by the folder that the build context `wheels` names; empty without one.
FROM scratch AS wheels

FROM ${BASE_IMAGE} AS build
ARG DEVICE=cpu
RUN case "${DEVICE}" in cpu | cuda) ;; *) echo "DEVICE is cpu or cuda, and not ${DEVICE}" >&2; exit 1 ;; esac
# The compiler is for the kernels; another version of it is no other behaviour, so none is pinned.
# hadolint ignore=DL3008
RUN command -v g++ > /dev/null || { \
        apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; }
# Two environments: pip stays in the one that is left behind.
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/roseinfer
# Other extras of pyproject.toml, for instance "loadtest" for an image with Locust in it. kv-events, a megabyte, is always
# there: with it a release can tell routers what its prefix caches hold.
ARG EXTRAS=""
# A package index to ask besides the usual one. PyTorch's own index of processor-only wheels saves some gigabytes.
ARG TORCH_INDEX=""
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY pyproject.toml constraints.txt ./
# Dependencies by themselves: they change with these two files only, so a new version of roseinfer moves megabytes and
# not gigabytes. What torch brings for its own tests, and for compiling against it, stays behind.
RUN --mount=type=bind,from=wheels,target=/wheels \
    if [ -n "$(ls /wheels)" ]; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels; fi \
    && /build/bin/python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        extras = [project['optional-dependencies'][name] for name in sys.argv[1:] if name != 'cpu']; \
        print(*project['dependencies'], *sum(extras, []), sep='\n')" "${DEVICE}" kv-events ${EXTRAS} \
        > requirements.txt \
    && /build/bin/pip --python /opt/roseinfer/bin/python install -c constraints.txt -r requirements.txt \
    && rm -rf /opt/roseinfer/lib/python3*/site-packages/torch/test /opt/roseinfer/lib/python3*/site-packages/torch/include
COPY README.md LICENSE ./
COPY src src
RUN --mount=type=bind,from=wheels,target=/wheels \
    if [ -n "$(ls /wheels)" ]; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels; fi \
    && /build/bin/pip --python /opt/roseinfer/bin/python install --no-deps --prefix /program .
# All levels of the platform, x86-64 or arm64, since nobody knows on which processor the image will run; it takes the
# highest that is there.
RUN mkdir /program/kernels \
    && PYTHONPATH=src /opt/roseinfer/bin/python -m roseinfer kernels build --level all --runner.kernels-dir /program/kernels

FROM ${BASE_IMAGE}
ARG DEVICE=cpu
# Triton has the kernels for CUDA call a launcher that a C compiler makes when they are first met, with Python's headers,
# which are a package of their own where Python is the distribution's.
# hadolint ignore=DL3008,SC2086
RUN if [ "${DEVICE}" = cuda ]; then \
        needed=""; command -v gcc > /dev/null || needed="gcc libc6-dev"; \
        [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || needed="${needed} python3-dev"; \
        if [ -n "${needed}" ]; then \
            apt-get update && apt-get install -y --no-install-recommends ${needed} && rm -rf /var/lib/apt/lists/*; fi; fi \
    && groupadd --gid 10001 roseinfer \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin roseinfer \
    && install -d -o 10001 -g 10001 /models
COPY --from=build /opt/roseinfer /opt/roseinfer
COPY --from=build /program /opt/roseinfer

# A node whose driver is too old for torch's CUDA refuses the container with that reason. Without GPUs nothing reads it.
# For a torch of another CUDA: `--build-arg REQUIRE_CUDA="cuda>=12.8"`.
ARG REQUIRE_CUDA="cuda>=13.0"
ENV NVIDIA_REQUIRE_CUDA=${REQUIRE_CUDA}

# The loopback of a container is nobody else's; which port whom reaches is decided outside of it. No address is all of
# them, of IPv4 and of IPv6: a kubelet asks at the pod's, and some clusters have none of IPv4.
ENV PATH=/opt/roseinfer/bin:$PATH \
    HOME=/tmp \
    HF_HOME=/models \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 \
    ROSEINFER_MODEL__PACKED_CACHE=/models/.roseinfer/packed \
    ROSEINFER_RUNNER__KERNELS_DIR=/opt/roseinfer/kernels \
    ROSEINFER_SERVER__HOST="" \
    ROSEINFER_SERVER__OPS_HOST=""
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8001
# Ready, not only alive: what waits for a healthy server wants to send to it. Where to ask is read from the server's own
# command line. A GPU's graphs and a large model take a while, so the first ten minutes do not count.
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s --retries=3 CMD ["python", "-m", "roseinfer.cli.health_check", "1"]
ENTRYPOINT ["roseinfer"]
CMD ["serve"]

ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="roseinfer" \
      org.opencontainers.image.description="An LLM inference server in which every millisecond of latency has a name." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
