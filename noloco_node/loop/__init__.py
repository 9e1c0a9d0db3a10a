"""A training loop that somebody has, as a node: its model, its optimizer and its data stay as they are.

    from noloco_node import loop

    with loop.join("<invitation>", model, optimizer, evaluate=held_out_loss) as swarm:
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss)
            if swarm.over:
                break

`swarm.py` runs the node beside the loop; `turns.py` lets one of the two work on the weights at a time; `task.py` is the
loop as the training thread sees it; `island.py` makes several processes one node; `hugging_face.py` is the same for
transformers' Trainer.
"""

from noloco_node.loop.swarm import Swarm, join, start

__all__ = ["Swarm", "join", "start"]
