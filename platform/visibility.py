"""Which devices of the machine torch sees, and in what order: a pure function of the environment variables.

The rules, and where the runtimes and their callers disagree, the one that is kept:

* A ROCm runtime first drops and renumbers by ROCR_VISIBLE_DEVICES; what is left is indexed by HIP_VISIBLE_DEVICES, for
  which CUDA_VISIBLE_DEVICES is another name. Both names set to different lists is an error. A CUDA runtime reads
  CUDA_VISIBLE_DEVICES only.
* An empty value means *no device*, never "unset": torch counts 0 devices then, and so do the CUDA runtime and ROCm's
  lower layer. (HIP's own layer alone would take it for unset.)
* The first entry that names no device ends the list; what stands before it stays.
* A device named twice empties the list, as torch counts; in ROCR_VISIBLE_DEVICES it ends the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

Runtime = Literal["hip", "cuda"]
UNKNOWN = -1  # a device that is visible though the uuids at hand do not tell which it is

# One stage per renumbering; the names within a stage are aliases, and the first wins in messages.
STAGES: dict[Runtime, tuple[tuple[str, ...], ...]] = {
    "hip": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    "cuda": (("CUDA_VISIBLE_DEVICES",),),
}
VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def visible(environ: Mapping[str, str], runtime: Runtime, count: int, uuids: Sequence[str] = ()) -> tuple[int, ...]:
    """The machine's device index behind each of torch's indices.

    `count` is the number of devices on the machine and `uuids` their "GPU-..." names, where known. An entry by uuid
    counts as `UNKNOWN` where no uuid is known, and so does every slice ("MIG-...").

    >>> visible({"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1"}, "hip", 4)
    (3,)
    >>> visible({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "hip", 4)
    Traceback (most recent call last):
    ValueError: HIP_VISIBLE_DEVICES is '0' and CUDA_VISIBLE_DEVICES is '1'; unset one of them or make them equal
    """
    return [tuple(range(count)), *(left for _, left in _steps(environ, runtime, count, uuids))][-1]


def hiding(
    environ: Mapping[str, str], runtime: Runtime, count: int, index: int, uuids: Sequence[str] = ()
) -> str | None:
    """The variable that leaves torch without device `index`, as a clause; None where none does.

    >>> hiding({"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, "hip", 2, 1)
    "ROCR_VISIBLE_DEVICES='1' leaves 1 of 2"
    """
    for setting, left in _steps(environ, runtime, count, uuids) if index < count else ():
        if index >= len(left):
            return f"{setting} leaves {len(left)} of {count}"
    return None


def _steps(
    environ: Mapping[str, str], runtime: Runtime, count: int, uuids: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(variable and value, devices left after it) of every variable in force."""
    seen = tuple(range(count))
    for aliases in STAGES[runtime]:
        values = [(name, environ[name]) for name in aliases if name in environ]
        if len({_entries(value) for _, value in values}) > 1:
            stated = " and ".join(f"{name} is {value!r}" for name, value in values)
            raise ValueError(f"{stated}; unset one of them or make them equal")
        if values:
            variable, value = values[0]
            seen = _pick(_entries(value), seen, uuids, repeat_ends=variable == "ROCR_VISIBLE_DEVICES")
            yield f"{variable}={value!r}", seen


def _entries(value: str) -> tuple[str, ...]:
    return tuple(entry.strip().casefold() for entry in value.split(","))


def _pick(entries: tuple[str, ...], seen: tuple[int, ...], uuids: Sequence[str], repeat_ends: bool) -> tuple[int, ...]:
    picked: list[int] = []
    for entry in entries:
        device = _find(entry, seen, uuids)
        if device is None:
            break
        if device != UNKNOWN and device in picked:
            return tuple(picked) if repeat_ends else ()
        if len(picked) == len(seen):  # unknown ones cannot be more than there are
            break
        picked.append(device)
    return tuple(picked)


def _find(entry: str, seen: tuple[int, ...], uuids: Sequence[str]) -> int | None:
    """The device that an entry names, None when it names none."""
    if entry.isascii() and entry.isdigit():
        return seen[int(entry)] if int(entry) < len(seen) else None
    if entry.startswith("mig-") or (entry.startswith("gpu-") and not any(uuids)):
        return UNKNOWN
    if not entry.startswith("gpu-"):
        return None
    # a leading part of the uuid is enough, as long as it fits one device only
    fits = [device for device in seen if device != UNKNOWN and uuids[device].casefold().startswith(entry)]
    return fits[0] if len(fits) == 1 else None
