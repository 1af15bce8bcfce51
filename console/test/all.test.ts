/** `npm --prefix console test` */

import "./batches.test";
import "./history.test";
import "./key.test";
import "./pool.test";
import "./rich.test";
import "./share.test";
import "./stages.test";
import "./compare.test";
