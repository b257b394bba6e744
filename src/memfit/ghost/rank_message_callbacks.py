"""The callbacks with which the ghost carries short buffers between ranks: ghost.h says what each must do."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

Exchange = Callable[[str, int, int, bytes | None], Sequence[bytes | None]]
"""``exchange(name, ranks, rank, sent)`` returns what each rank sent under a name; None for unknown bytes."""

Send = Callable[[str, bytes | None], object]
"""``send(name, sent)`` sends a message of one rank to another; None for unknown bytes."""
Receive = Callable[[str], bytes | None]
"""``receive(name)`` waits for that message and returns it."""

_MESSAGE = (
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
)
MESSAGE_CALLBACK = ctypes.CFUNCTYPE(*_MESSAGE)
EXCHANGE_CALLBACK = ctypes.CFUNCTYPE(*_MESSAGE, ctypes.c_void_p, ctypes.POINTER(ctypes.c_ubyte))


def rank_exchange_callback(exchange: Exchange) -> Any:
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
            _report(error)
            return 1
        for each, part in enumerate(found):
            known[each] = part is not None
            if part:
                ctypes.memmove(received + each * size, part, size)
        return 0

    return EXCHANGE_CALLBACK(carry)


def rank_send_callback(send: Send) -> Any:
    """Return a C function that sends a message; it must be referenced like that of the exchange."""

    def carry(group: bytes, call: int, source: int, to: int, sent: int | None, size: int) -> int:
        try:
            send(_message(group, call, source, to), None if sent is None else ctypes.string_at(sent, size))
        except Exception as error:  # noqa: BLE001 - as above
            _report(error)
            return 1
        return 0

    return MESSAGE_CALLBACK(carry)


def rank_receive_callback(receive: Receive) -> Any:
    """Return a C function that receives a message; it must be referenced like the others."""

    def fetch(group: bytes, call: int, source: int, to: int, received: int, size: int) -> int:
        try:
            found = receive(_message(group, call, source, to))
        except Exception as error:  # noqa: BLE001 - as above; the script reads unknown bytes
            _report(error)
            return 0
        if found is None or len(found) != size:
            return 0
        ctypes.memmove(received, found, size)
        return 1

    return MESSAGE_CALLBACK(fetch)


def _message(group: bytes, call: int, source: int, to: int) -> str:
    return f"{group.decode()}/{source}-{to}/{call}"


def _report(error: Exception) -> None:
    print(f"memfit: ranks could not exchange their buffers: {error}", file=sys.stderr)
