"""What a step minimises: functions of the log-probabilities of answers, by the names of
--objective.

scored.py has log-probabilities by token and by answer, and the derivative of a loss by each of
them; preferences.py, kto.py and rollouts.py have the losses; rows.py and rollout_rows.py have the
rows of data that they read; decide.py finds an objective by its flags.
"""
