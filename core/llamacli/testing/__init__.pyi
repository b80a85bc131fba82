from llamacli.testing.checks import check_shapes as check_shapes
from llamacli.testing.conformance import ConformanceError as ConformanceError
from llamacli.testing.conformance import check_op as check_op
from llamacli.testing.hugging_face import HuggingFaceModel as HuggingFaceModel
from llamacli.testing.models import write_model as write_model
from llamacli.testing.parametrize import checks_of as checks_of
from llamacli.testing.parametrize import parametrize_with_checks as parametrize_with_checks
from llamacli.testing.tiny import write_architecture as write_architecture
