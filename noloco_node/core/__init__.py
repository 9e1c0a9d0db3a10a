"""Pure: the maths, the codecs and the round's state machine; no IO, no clock, no random generator of their own."""
