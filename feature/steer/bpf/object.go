// SPDX-License-Identifier: Apache-2.0

package bpf

// The objects embedded by bpf2go. Pins record the hash of an object (kernel.ObjectHash), so an upgrade recognizes
// outdated programs. Only tests of upgrades set these variables.
var (
	SteerObject     = _SteerBytes     // engine sk_lookup
	ReuseObject     = _ReuseBytes     // engine sk_reuseport
	BindObject      = _BindBytes      // daemons that share a port
	CopyObject      = _CopyBytes      // copies of a service's datagrams
	TemplatesObject = _TemplatesBytes // exporters' templates
)
