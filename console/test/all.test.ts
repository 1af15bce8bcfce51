/** `npm --prefix console test` */

import "./rich.test";
import "./stages.test";
import "./compare.test";
