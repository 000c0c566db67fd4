"""Environments and tools for multi-turn episodes; names are imported lazily, at first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.environments.openenv import OpenEnv, OpenEnvError
    from lowmem_grpo.environments.protocol import Anew, AskBase
    from lowmem_grpo.environments.tools.mcp import mcp_tools
    from lowmem_grpo.environments.tools.python import python_tool
    from lowmem_grpo.environments.tools.results import FinalResult, ToolError, ToolOutage
    from lowmem_grpo.environments.tools.toolbox import Toolbox

__all__ = [
    "Anew", "AskBase", "FinalResult", "OpenEnv", "OpenEnvError", "ToolError", "ToolOutage", "Toolbox", "mcp_tools",
    "python_tool",
]

HOMES = {
    **dict.fromkeys(("Anew", "AskBase"), "environments.protocol"),
    **dict.fromkeys(("OpenEnv", "OpenEnvError"), "environments.openenv"),
    **dict.fromkeys(("FinalResult", "ToolError", "ToolOutage"), "environments.tools.results"),
    "Toolbox": "environments.tools.toolbox", "mcp_tools": "environments.tools.mcp",
    "python_tool": "environments.tools.python",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        known = ", ".join(__all__)
        raise AttributeError(f"module 'lowmem_grpo.environments' has no attribute {name!r}; it has {known}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
