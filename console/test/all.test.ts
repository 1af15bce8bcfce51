/** `npm --prefix console test` */

import "./batches.test";
import "./rich.test";
import "./stages.test";
