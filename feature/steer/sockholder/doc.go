// SPDX-License-Identifier: Apache-2.0

// Package sockholder is the socket holder: a process that owns sockets for engines and
// sleeps. Engines start it by engine.HolderCommand, which runs Hold.
package sockholder
