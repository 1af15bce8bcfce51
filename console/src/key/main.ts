import "../styles/page";

import { themeButton } from "../page/theme";

themeButton();
