"""The store of responses and conversations: a bound in bytes, and the least recently used go."""

from __future__ import annotations

import pytest

from vllm.server.errors import ApiError
from vllm.server.rendering.written_json import Written
from vllm.server.response_store import Conversation, ResponseStore, StoredResponse


def stored(name, text="x" * 100, context=()):
    item = {"id": f"msg_{name}", "text": text}
    return StoredResponse({"id": name, "output": [item]}, list(context))


def names(store, count):
    found = []
    for index in range(count):
        try:
            store.response(str(index))
        except ApiError as error:
            assert error.status == 404
        else:
            found.append(index)
    return found


def test_the_bound_holds():
    store = ResponseStore(1000)
    for index in range(20):
        store.put(str(index), stored(str(index)))
    kept = names(store, 20)
    assert 5 <= len(kept) <= 7 and kept == list(range(20 - len(kept), 20))
    assert store.item("msg_0") is None and store.item("msg_19")["id"] == "msg_19"
    store.put("large", stored("large", "x" * 2000))
    assert names(store, 20) == kept
    with pytest.raises(ApiError, match="--response-store-mib"):
        store.response("large")


def test_what_is_used_stays():
    store = ResponseStore(1000)
    for index in range(20):
        store.put(str(index), stored(str(index)))
        store.response("0")
    assert names(store, 20)[0] == 0


def test_nothing_is_kept_without_room():
    store = ResponseStore(0)
    store.put("0", stored("0"))
    assert names(store, 1) == [] and store.item("msg_0") is None


def test_items_stay_as_long_as_someone_has_them():
    store = ResponseStore(10_000)
    first = stored("0")
    store.put("0", first)
    store.put("1", stored("1", context=first.context))
    assert store.remove("0") and not store.remove("0")
    assert store.item("msg_0") == first.response["output"][0]
    assert [item["id"] for item in store.response("1").context] == ["msg_0", "msg_1"]
    store.remove("1")
    assert store.item("msg_0") is None


def test_what_is_removed_is_not_renewed():
    store, conversation = ResponseStore(1000), Conversation({"id": "c"})
    store.put("c", conversation)
    conversation.items.append({"id": "i"})
    store.renew("c", conversation)
    assert store.item("i") == {"id": "i"}
    store.remove("c")
    store.renew("c", conversation)
    with pytest.raises(ApiError):
        store.conversation("c")
    assert store.item("i") is None


def test_sizes_follow_what_grows():
    store = ResponseStore(1000)
    conversation = Conversation({"id": "c"})
    store.put("c", conversation)
    conversation.items += [{"id": str(index), "text": "x" * 100} for index in range(5)]
    store.put("c", conversation)
    assert store.conversation("c").items == conversation.items
    for index in range(3):
        store.put(str(index), stored(str(index)))
    # It was used before all of these, and is the largest.
    with pytest.raises(ApiError):
        store.conversation("c")
    assert names(store, 3) == [0, 1, 2]
    with pytest.raises(ApiError):
        store.response("c")


def test_wide_readings_count():
    store = ResponseStore(1000)
    entry = stored("0")
    entry.response["readings"] = [Written([b"[", b"1" * 2000, b"]"])]
    store.put("0", entry)
    assert names(store, 1) == []
