"""Names of content that mean the same in every process: an engine's own hashes have the numbers of adapters' loads and
of pictures in them, which say nothing to others."""

from __future__ import annotations

from vllm.v1.core.block_pool import extend_block_hashes, hash_full_blocks
from vllm.v1.request import Request


class ContentNames:
    """The names of requests' blocks, each computed once.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By request, where its names differ from the engine's hashes: what of them is known.
        self._hashes: dict[str, tuple[str, list[bytes]]] = {}
        self._token_ids: dict[str, list[int]] = {}  # of prompts with pictures

    @staticmethod
    def has_name(request: Request) -> bool:
        """Whether other processes can know what computes the request."""
        return not request.content_number or bool(request.content_name)

    def names(self, request: Request) -> dict[bytes, bytes]:
        """The names by the engine's hashes of a request's full blocks; {}: they are the same."""
        if not request.content_number and request.images is None:
            return {}
        own = self._own(request)
        return dict(zip(extend_block_hashes(request, self._block_size), own, strict=False))

    def hashes(self, request: Request) -> list[bytes]:
        """The names of a request's full blocks in order, as far as the engine has hashed them; none where others cannot
        know what computes it."""
        if not self.has_name(request):
            return []
        known = request.block_hashes
        names = self.names(request) if known else {}
        return [names[each] for each in known] if names else list(known)

    def begins_anew(self, request: Request) -> None:
        """Its last tokens may be others than those that were named."""
        self._hashes.pop(request.request_id, None)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self.begins_anew(request)
        self._token_ids.pop(request.request_id, None)

    def _own(self, request: Request) -> list[bytes]:
        salt = f"\0{request.content_name}\0{request.cache_salt or ''}"
        of, known = self._hashes.get(request.request_id, (None, []))
        if of != salt:
            self._hashes[request.request_id] = salt, (known := [])
        return hash_full_blocks(self.token_ids(request), self._block_size, salt, known)

    def token_ids(self, request: Request) -> list[int]:
        """The request's tokens, with names of pictures' rows, below -1, in place of theirs."""
        if request.images is None:
            return request.token_ids
        own = self._token_ids.setdefault(request.request_id, [])
        if not own:
            own += request.token_ids
            for picture in request.images.pictures:
                for row, name in zip(picture.rows.tolist(), picture.row_names.tolist(), strict=True):
                    own[picture.start + row] = name
        # Some of those that were known may have been dropped.
        num_prompt = request.num_prompt_tokens
        own[num_prompt:] = request.token_ids[num_prompt:]
        return own
