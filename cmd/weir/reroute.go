// SPDX-License-Identifier: Apache-2.0

package main

import _ "github.com/weir-project/weir/cmd/weir/reroute" // adds its commands
