// The page "Live".

import { mountShell } from "./shell.js";

mountShell("live");
