# The image that pods of farstep.KubernetesConfig run: farstep with what its environments and agents need.
#
#   docker build -t NAME:TAG .                                      torch and the usual environments
#   docker build -t NAME:TAG --build-arg EXTRAS=envpool .           other extras of pyproject.toml; none: EXTRAS=
#   docker build -t NAME:TAG --build-arg PACKAGES="minigrid" .      further packages, e.g. of your environments
#
# The head and all pods need the same versions of farstep, Python (3.11 is one), NumPy and Gymnasium: build the image from
# the checkout that the head runs. constraints.txt says which these are. See docs/kubernetes.md.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ swig && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/farstep
ENV PATH=/opt/farstep/bin:$PATH
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
ARG EXTRAS=torch,envs
ARG PACKAGES=
RUN pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}" ${PACKAGES}

FROM python:${PYTHON}-slim
# Pods run as this user, by its number, whatever the image.
RUN useradd --uid 1000 --create-home farstep
COPY --from=build /opt/farstep /opt/farstep
ENV PATH=/opt/farstep/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/farstep
CMD ["farstep", "--help"]
