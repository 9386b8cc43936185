"""Evaluation: lm-eval's tasks and scores on dense and upcycled models, paired comparisons, a report.

python -m evaluation run mmlu CHECKPOINT data=FOLDER     suites/ names tasks, lm.py answers their requests
python -m evaluation compare A B                         compare.py, over what results.py keeps
"""
