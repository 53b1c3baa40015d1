"""`Failed` among the results that a join gets: a map of one key that no result has."""

from typing import Any, Final

from chasqui.converting.converter import Converter, mismatch
from chasqui.model.steps import Failed

_EXPECTED: Final = "a Failed"


def _encode(value: Any) -> Any:
    return value.to_data() if isinstance(value, Failed) else mismatch(_EXPECTED, value)


def _decode(value: Any) -> Any:
    return Failed.of(value) or mismatch(_EXPECTED, value)


FAILED: Final = Converter(_EXPECTED, frozenset((dict,)), (Failed,), _encode, _decode)


def or_failed(result: Converter) -> Converter:
    """The union with `Failed` of whatever a result may be: also of what is a map itself."""
    encode_result, decode_result = result.encoder, result.decoder

    def encode(value: Any) -> Any:
        return value.to_data() if isinstance(value, Failed) else encode_result(value)

    def decode(value: Any) -> Any:
        failed = Failed.of(value)
        return decode_result(value) if failed is None else failed

    return Converter(
        f"{result.expected} or {_EXPECTED}",
        result.kinds | FAILED.kinds,
        (*result.accepts, Failed),
        encode,
        decode,
    )
