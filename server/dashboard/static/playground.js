// The page "Playground".

import { mountShell } from "./shell.js";

mountShell("playground");
