"""Floor 3, data: from the files of a person to token ids with a trained mark, and from there to micro-batches.

The road: readers (files -> rows), roles and chat (conversations -> ids), windows (documents -> ids), split, pack,
order. No torch here. Brothers on this floor are used downwards only: prepare -> chat, windows, split -> tokens.
"""
