"""State space models: Mamba, Mamba-2, Jamba and Falcon-H1.

Gu and Dao 2023 (arXiv:2312.00752), Dao and Gu 2024 (arXiv:2405.21060), Lieber et al. 2024 (Jamba, arXiv:2403.19887),
Zuo et al. 2025 (Falcon-H1, arXiv:2507.22448). RMSNorm before each layer; the state space layers are those of the core.
"""

from llamacli.plugin import hookimpl
from llamacli_mamba.hybrid import FalconH1, Jamba
from llamacli_mamba.pure import Mamba, Mamba2

LLAMACLI_API = 1


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures of this family."""
    for architecture in (FalconH1, Jamba, Mamba, Mamba2):
        register(architecture())
