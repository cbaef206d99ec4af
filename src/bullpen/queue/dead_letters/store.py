"""The dead letters of a queue behind the interface of all stores (`bullpen.ports.dead_letters`).

In: a queue and the rule of its policy. Out: a store over its dead-letter queue, or over its failed set where that is
what the policy names.
Elsewhere: the dead-letter queue (`operations`), the failed set (`failed_set`).
"""

from __future__ import annotations

from bullpen._kernel import policy
from bullpen.errors import InvalidOption
from bullpen.ports.dead_letters import DeadLetterStore
from bullpen.queue.queue import Queue

__all__ = ["dead_letter_store"]


def dead_letter_store(queue: Queue, rule: policy.DeadLetterPolicy) -> DeadLetterStore:
    """Where the finally failed jobs of a queue are, by the rule of its policy.

    Raises InvalidOption for the rules `none` and `row`: nothing is kept, or not by the queue.
    """
    match rule.store:
        case "queue":
            return queue.dead_letters
        case "failed_set":
            return queue.failed_set
    raise InvalidOption("dead_letters.store", "'queue' or 'failed_set' for the dead letters of a queue", rule.store)
