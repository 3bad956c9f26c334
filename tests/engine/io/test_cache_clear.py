from __future__ import annotations

from engine.io.store.cache_clear import CacheClear
from shared import wire


def test_a_clear_is_sent_again_until_the_kvstore_has_certainly_read_and_run_it() -> None:
    sent: list[wire.Message] = []
    is_ready = False

    def send(message: wire.Message) -> bool:
        if is_ready:
            sent.append(message)
        return is_ready

    clear = CacheClear({"a"}, send)
    clear.send()
    clear.request()
    is_ready = True
    for _ in range(2):
        clear.send()
        clear.on_probe_answered(is_clearing=False)  # it may have been sent before the clear
        clear.on_disconnected()
    assert sent == [wire.Clear(namespace="a")] * 2
    clear.send()
    clear.on_probe_answered(is_clearing=False)
    for _ in range(3):
        clear.on_probe_answered(is_clearing=True)
    clear.on_disconnected()
    clear.send()
    assert len(sent) == 4, "it was killed while it removed blocks"
    clear.on_probe_answered(is_clearing=False)
    clear.on_probe_answered(is_clearing=False)
    clear.on_disconnected()
    clear.send()
    assert len(sent) == 4
    clear.request()
    assert len(sent) == 5
