# docker build -t fathom . && docker run --gpus all --ipc host -v $PWD/runs:/fathom/runs fathom
# The steps are those of README and of .ci/run: apt's packages, then the Makefile's environment.
FROM debian:13-slim
RUN apt-get update && apt-get install -y build-essential python3-venv python3-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /fathom
ENV PIP_NO_CACHE_DIR=1
COPY Makefile requirements.txt requirements-extra.txt ./
RUN make environment && .venv/bin/pip install -r requirements-extra.txt
COPY . .
CMD ["make", "train"]
