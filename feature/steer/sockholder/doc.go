// SPDX-License-Identifier: Apache-2.0

// Package sockholder is the socket holder: a sleeping process that owns sockets for engines. Engines start it through
// engine.SocketHolderCommand, which calls Run.
package sockholder
