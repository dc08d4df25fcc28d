"""What a step minimises: functions of the log-probabilities of answers, by the names of
--objective.

scored.py has log-probabilities by token and by answer, and the derivative of a loss by each of
them; preferences.py and rollouts.py have the losses; rows.py has the rows of data that they read;
choose.py finds an objective by its flags.
"""
