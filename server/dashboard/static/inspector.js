// The page "Inspector".

import { mountShell } from "./shell.js";

mountShell("inspector");
