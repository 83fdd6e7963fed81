"""Why a step went bad: run it again on its untouched state, see where NaN and Inf are born, decide by what is seen."""
