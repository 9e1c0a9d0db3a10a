"""How much longer than on an idle machine tests wait before they fail: TEST_PATIENCE, which .ci/run sets."""

import os

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
