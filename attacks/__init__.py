"""Score-based membership attacks, their statistics and their intervals, on NumPy and SciPy alone.

Scores come in as a `ScoreMatrix` (M models, N samples, Q queries, and who trained on what), from
training here or elsewhere; every attack gives `AttackScores`, higher for members, NaN with a reason
code where there is none.

- `types`, `statistics`: what goes in and out; phi, loss, p and margin from logits
- `exclusion`, `leave_out`, `outcome`: who is left out for a target, and sums without them
- `lira`, `rmia`, `threshold` (loss, calibrated, attack P and R), `quantile`, `population`
- `metrics`, `memorization`: ROC, AUC, TPR at FPR, PPV; memorization, influence, exposure
- `intervals`, `evaluate`: jackknife over models, paired differences, table rows with replicates
- `audit`: lower bounds on epsilon and mu
- `interop`, `npz`, `loaded`, `files`, `export`: other people's layouts
"""
