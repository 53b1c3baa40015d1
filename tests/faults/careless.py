"""chasqui's own scripts with one protection switched off, for controls."""

import hashlib

from chasqui.transport.request import Script

#: Stands before the script and sees its commands. Nothing in the text of the script is looked for,
#: so that a script may be written anew without a control that quietly changes nothing.
_BETWEEN = """
local server = redis
local function instead(ask, ...)
  local name, key, a, b, c, d = ...
  if {condition} then
    {instead}
  end
  return ask(...)
end
local redis = {{
  call = function(...) return instead(server.call, ...) end,
  pcall = function(...) return instead(server.pcall, ...) end,
}}
"""


def careless(script: Script, *commands: str, instead: str) -> Script:
    """The same script, but that these of its commands are done as the Lua in `instead` does them.

    It finds the command in `name, key, a, b, c, d`, passes it on with `ask(...)` and, where it
    returns nothing, lets it happen as it came."""
    used = [name for name in commands if f"'{name}'".encode() in script.source]
    assert used, f"{script} has none of {commands}"
    condition = " or ".join(f"name == '{name}'" for name in used)
    source = _BETWEEN.format(condition=condition, instead=instead).encode() + script.source
    sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
    return Script(script.name, source, sha)
