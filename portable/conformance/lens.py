"""Lengths of the requests that the kit asks for, by name: (query length, sequence length) of each."""

from __future__ import annotations

from collections.abc import Mapping

Lens = tuple[tuple[int, int], ...]

LENS: Mapping[str, Lens] = {
    "extend": ((3, 7), (0, 5), (5, 40), (0, 0), (2, 20)),
    "decode": ((1, 1), (1, 17), (1, 33), (1, 6)),
    "prefill": ((5, 5), (1, 1), (12, 12)),
    "verify": ((4, 9), (4, 30)),
    "no_keys": ((2, 0), (3, 3), (1, 0), (4, 6)),
    "more_queries": ((6, 3), (2, 0), (5, 4), (3, 9)),
    "long": ((1, 300), (7, 263), (2, 5)),
    "long_decode": ((1, 300), (1, 257), (1, 0), (1, 4)),
    "one": ((1, 18),),  # of more keys one row shows too little of a scale beside a softcap
    "one_prompt": ((9, 25),),
    "many": (*((1, 5 * r % 24) for r in range(19)), (1, 70)),  # past 8 and past 16, where grids and tables end
    "prompts_no_keys": ((70, 0), (128, 128), (100, 40)),
}
LONG: Mapping[str, Lens] = {  # for kernels that want more queries than most of those have; a name means one thing
    "prompts": ((64, 64), (130, 130), (200, 200)),
    "chunks": ((130, 300), (65, 400), (64, 65), (0, 5)),
    "beside_decodes": ((1, 150), (128, 128), (7, 63)),
    "prompts_no_keys": LENS["prompts_no_keys"],
    "one_long_prompt": ((70, 76),),
    "many_prompts": ((65, 90), *((1, 5 * r % 24) for r in range(18)), (64, 70)),
}
MORE: Mapping[str, Lens] = {  # what a report asks beside those
    "holes": ((1, 9), (0, 0), (2, 12), (0, 0), (0, 6), (1, 20)),
    "one_2k": ((1, 2049),),
    "to_4k": ((1, 2047), (5, 2049), (1, 17), (1, 4097)),
    "prompts_to_4k": ((64, 2047), (130, 2049), (1, 17), (70, 4097)),
    "to_32k": ((1, 32768), (5, 20011), (1, 17), (3, 4097)),
    "prompts_to_32k": ((64, 32768), (130, 20011), (1, 17), (70, 4097)),
}
NAMED: Mapping[str, Lens] = {**LENS, **LONG, **MORE}
