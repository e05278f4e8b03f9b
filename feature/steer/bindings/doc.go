// SPDX-License-Identifier: Apache-2.0

// Package bindings binds prefixes, protocols and ports of a namespace to services and
// to registered sockets. A change of many bindings takes effect at once, and is
// recovered by the next writer after a kill.
package bindings
