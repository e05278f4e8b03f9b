// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"github.com/weir-project/weir/feature"
	"golang.org/x/sys/unix"
)

var _ feature.Privileged = Feature{}

// Rights implements feature.Privileged.
func (Feature) Rights() []feature.Right {
	return []feature.Right{
		{Capability: unix.CAP_NET_RAW, For: "hear and replay templates"},
		{Capability: unix.CAP_SETUID, For: "ready.command as the member's user"},
		{Capability: unix.CAP_SETGID, For: "ready.command with the member's groups"},
		{Capability: unix.CAP_SETPCAP, For: "ready.command without the capabilities that the member lacks"},
		{Capability: unix.CAP_KILL, For: "end a ready.command, signal the socket holder of a group"},
	}
}
