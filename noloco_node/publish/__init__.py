"""Publishing what a run has trained. Reads checkpoints and exports, writes one folder, knows nothing of the swarm.

weights.py     checkpoints and exported folders -> one model, or the mean of several
hf_folder.py   a Hugging Face folder of it          model_card.py   its model card
evaluate.py    its loss on the held-out text
"""
