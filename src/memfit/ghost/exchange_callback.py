"""The callback with which the ghost exchanges short buffers between ranks: ``ghost_exchange`` of ghost.h."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

Exchange = Callable[[str, int, int, bytes | None], Sequence[bytes | None]]
"""``exchange(name, ranks, rank, sent)`` returns what each rank sent under a name; None for unknown bytes."""

EXCHANGE_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_ubyte),
)


def exchange_callback(exchange: Exchange) -> Any:
    """Return a C function that exchanges bytes; it must be referenced as long as the ghost may call it."""

    def carry(  # noqa: PLR0913, PLR0917 - those of ghost_exchange
        group: bytes,
        call: int,
        ranks: int,
        rank: int,
        sent: int | None,
        size: int,
        received: int,
        known: "ctypes._Pointer[ctypes.c_ubyte]",
    ) -> int:
        own = None if sent is None else ctypes.string_at(sent, size)
        try:
            found = exchange(f"{group.decode()}/{call}", ranks, rank, own)
        except Exception as error:  # noqa: BLE001 - none may pass through C; PyTorch raises for NCCL's
            print(f"memfit: ranks could not exchange their buffers: {error}", file=sys.stderr)
            return 1
        for each, part in enumerate(found):
            known[each] = part is not None
            if part:
                ctypes.memmove(received + each * size, part, size)
        return 0

    return EXCHANGE_CALLBACK(carry)
