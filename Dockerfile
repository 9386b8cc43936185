# syntax=docker/dockerfile:1
# A GPU machine's image: CUDA, torch, Transformer Engine, DeepEP or Hybrid-EP, and our wheel.
#
#     docker build -t upcycle .                         # Hybrid-EP, which also has DeepEP 1.x: what our benchmarks ran
#     docker build -t upcycle --build-arg EP=deepep .   # DeepEP 2.x
#
# NO ONE HAS BUILT THIS FILE: it was written where no base image can be pulled. hadolint passes it, and the stage `ours` and
# the wheel's installation were run by hand on CPUs. The commits and versions are those of our GPU measurements where
# there are some (docs/supported.md): torch 2.11.0, Transformer Engine 2.12.0, Hybrid-EP 94a9f8f.

ARG CUDA=13.0.2
ARG EP=hybrid-ep

# ---- what all stages share; the kernels are compiled at run time too, so that nvcc stays in the image

FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04 AS base
ARG TORCH=2.11.0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch brings NCCL and NVSHMEM as wheels; the constraint keeps later steps from replacing it
RUN pip install "torch==${TORCH}" && echo "torch==${TORCH}" > /opt/constraints.txt
ENV PIP_CONSTRAINT=/opt/constraints.txt

FROM base AS build
# the architectures to compile for: 9.0 is Hopper
ARG ARCHITECTURES=9.0
ENV TORCH_CUDA_ARCH_LIST=${ARCHITECTURES} MAX_JOBS=8
# hadolint ignore=DL3013
RUN pip install "setuptools<81" wheel packaging pybind11

# ---- one stage for each part that is compiled

FROM build AS te
ARG TRANSFORMER_ENGINE=2.12.0
RUN pip wheel --no-build-isolation --no-deps --wheel-dir /wheels \
    "transformer-engine[pytorch,core-cu13]==${TRANSFORMER_ENGINE}" "transformer-engine-cu13==${TRANSFORMER_ENGINE}" \
    "transformer-engine-torch==${TRANSFORMER_ENGINE}"

# DeepEP's branch hybrid-ep of 10 July 2026: HybridEPBuffer, and Buffer of DeepEP 1.x; inside one node
FROM build AS hybrid-ep
ARG HYBRID_EP_COMMIT=94a9f8f6b146c07d97ec58f67cd6d303296d6098
WORKDIR /src
RUN git init --quiet . && git fetch --quiet --depth 1 https://github.com/deepseek-ai/DeepEP "${HYBRID_EP_COMMIT}" \
    && git checkout --quiet FETCH_HEAD \
    && pip wheel --no-build-isolation --no-deps --wheel-dir /wheels .

# DeepEP's branch main of 14 July 2026: ElasticBuffer of DeepEP 2.x, which needs a newer NCCL than torch 2.11 brings
FROM build AS deepep
ARG DEEPEP_COMMIT=dd758caf451848bd150e1046af3d0a73e5fff38d
ARG NCCL=2.30.4
WORKDIR /src
RUN pip download --no-deps --dest /wheels "nvidia-nccl-cu13==${NCCL}" \
    && pip install --no-deps --no-index --find-links /wheels "nvidia-nccl-cu13==${NCCL}" \
    && git init --quiet . && git fetch --quiet --depth 1 https://github.com/deepseek-ai/DeepEP "${DEEPEP_COMMIT}" \
    && git checkout --quiet FETCH_HEAD && git submodule update --quiet --init --depth 1 third-party/fmt \
    && pip wheel --no-build-isolation --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${EP} AS ep

# ---- our wheel

FROM base AS ours
RUN pip install hatchling==1.32.4
WORKDIR /src
COPY . .
RUN python -m hatchling build --target wheel --directory /wheels

# ---- the image

FROM base AS upcycle
COPY --from=ours /wheels /wheels/ours
# hadolint ignore=DL3013
RUN pip install "upcycle[all] @ file://$(ls /wheels/ours/*.whl)"
COPY --from=te /wheels /wheels/te
COPY --from=ep /wheels /wheels/ep
# Transformer Engine's own dependencies come from the index; a newer NCCL replaces torch's without its consent
# hadolint ignore=DL3013
RUN pip install /wheels/te/*.whl && pip install --no-deps /wheels/ep/*.whl && pip install pynvml==13.0.1 && rm -r /wheels
WORKDIR /work
ENTRYPOINT ["upcycle"]
CMD ["--help"]
