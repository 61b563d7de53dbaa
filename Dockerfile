# penstock's container images. Targets, each of them small, without root and with pinned packages:
#
#   docker build --target edge -t penstock:0.1.0-edge .    gateways and the fleet controller; no torch, no compiler
#   docker build --target cpu  -t penstock:0.1.0-cpu --build-arg TORCH_INDEX=… .    replicas on CPUs; the index of torch's
#                                                          builds for CPUs, as pytorch.org names it
#   docker build --target cuda -t penstock:0.1.0-cuda .    replicas on NVIDIA GPUs; the driver comes from the node
#
# Name the base image by its digest (--build-arg PYTHON_IMAGE=python@sha256:…) for an image that can be built again.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# -- penstock's wheel

FROM ${PYTHON_IMAGE} AS wheel
ARG SOURCE_DATE_EPOCH=315532800
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH}
WORKDIR /build
COPY requirements-build.lock ./
RUN python -m venv /opt/builder && /opt/builder/bin/pip install --require-hashes -r requirements-build.lock
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY src src
RUN /opt/builder/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# -- virtual environments; bytecode by hashes, not by times, so that two builds are equal

FROM ${PYTHON_IMAGE} AS edge-environment
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY requirements-image.lock ./
RUN python -m venv --without-pip /opt/penstock && python -m pip --python /opt/penstock/bin/python install --require-hashes -r requirements-image.lock
COPY --from=wheel /wheels /wheels
RUN python -m pip --python /opt/penstock/bin/python install --no-deps --no-index /wheels/*.whl
RUN /opt/penstock/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/penstock/lib

FROM edge-environment AS engine-environment
COPY requirements.lock ./
RUN python -m pip --python /opt/penstock/bin/python install --require-hashes -r requirements.lock

FROM engine-environment AS cpu-environment
ARG TORCH_INDEX=
COPY requirements-torch.lock ./
RUN python -m pip --python /opt/penstock/bin/python install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r requirements-torch.lock
RUN /opt/penstock/bin/python -c "import sys, torch; sys.exit(torch.version.cuda and 'this torch is for CUDA: pass --build-arg TORCH_INDEX, the index of its builds for CPUs')"
RUN /opt/penstock/bin/python -m compileall -q -j 0 -x torch/testing/_internal/ --invalidation-mode unchecked-hash /opt/penstock/lib

FROM engine-environment AS cuda-environment
COPY requirements-torch.lock ./
RUN python -m pip --python /opt/penstock/bin/python install -r requirements-torch.lock
RUN /opt/penstock/bin/python -m compileall -q -j 0 -x torch/testing/_internal/ --invalidation-mode unchecked-hash /opt/penstock/lib

# -- what runs

FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 penstock \
 && useradd --uid 10001 --gid 10001 --home-dir /var/lib/penstock --no-create-home --shell /usr/sbin/nologin penstock \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/penstock /var/cache/penstock
ENV PATH=/opt/penstock/bin:${PATH} PENSTOCK_HOME=/var/lib/penstock PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/penstock
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
ENTRYPOINT ["penstock"]
CMD ["--help"]

# Kernels are compiled for the processor that they find, once: a C compiler is part of these. Triton needs one, too.
FROM runtime AS engine
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log

FROM engine AS cpu
COPY --from=cpu-environment /opt/penstock /opt/penstock
USER 10001:10001

FROM engine AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-environment /opt/penstock /opt/penstock
USER 10001:10001

FROM runtime AS edge
COPY --from=edge-environment /opt/penstock /opt/penstock
USER 10001:10001
