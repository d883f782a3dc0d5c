# An image for Ascend NPUs. UNTESTED: nobody has built or run it; docs/ascend.md says how far its parts were shown.
#   docker build -f docker/npu.Dockerfile -t rlworker-npu .
#   docker run --device /dev/davinci0 --ipc host rlworker-npu check FOLDER --platform npu
# The base image brings CANN 9.1.0 and a Python 3.11, and sources CANN's set_env.sh. triton-ascend is on Ascend's own
# package index and is left out.
ARG BASE=ascendai/cann:9.1.0-910b-ubuntu22.04-py3.11
FROM ${BASE}

RUN python3 -m venv /opt/rlworker
ENV PATH=/opt/rlworker/bin:$PATH

COPY requirements/npu.txt requirements/
RUN sed -i "/^triton-ascend==/d" requirements/npu.txt \
 && pip install --no-cache-dir --no-deps -r requirements/npu.txt

COPY . /src
RUN pip install --no-cache-dir --no-deps /src

ENTRYPOINT ["rlworker"]
