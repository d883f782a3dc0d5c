# An image for NVIDIA cards. UNTESTED: nobody has built or run it; docs/cuda.md says how far its parts were shown.
#   docker build -f docker/cuda.Dockerfile -t rlworker-cuda .
#   docker run --gpus all --ipc host rlworker-cuda check FOLDER --platform cuda
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu22.04
FROM ${BASE}

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.11 python3.11-venv python3.11-dev gcc g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python3.11 -m venv /opt/rlworker
ENV PATH=/opt/rlworker/bin:$PATH

COPY requirements/cuda.txt requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/cuda.txt

COPY . /src
RUN pip install --no-cache-dir --no-deps /src

ENTRYPOINT ["rlworker"]
