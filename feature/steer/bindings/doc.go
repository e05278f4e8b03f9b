// SPDX-License-Identifier: Apache-2.0

// Package bindings binds prefixes, protocols and ports of a namespace to services and registered sockets. A change of
// many bindings takes effect at once. After a kill, the next writer recovers it.
package bindings
