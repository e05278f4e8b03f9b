// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"fmt"

	"github.com/weir-project/weir/kernel/instances"
)

// Unreads is implemented by the states of features whose instances can be unreadable: not up in metrics, not healthy.
type Unreads interface {
	Unread() instances.Unreadable
}

// UnreadRemedy is what to do about an instance that cannot be read.
const UnreadRemedy = "use the weir that made it, or remove it with that one"

// UnreadFindings tells doctor of instances that cannot be read.
func UnreadFindings(all instances.Unreadable) (out []Finding) {
	for _, u := range all.WithoutDamage() {
		out = append(out, Failure(u.Name, "cannot be read: "+u.Error(), UnreadRemedy))
	}
	return out
}

// UnreadSights tells explain of instances in a packet's network namespace that cannot be read.
func UnreadSights(all instances.Unreadable, p Packet, stage Stage) (out []Verdict) {
	for _, u := range all.In(fmt.Sprint(p.Inode)) {
		out = append(out, Verdict{Stage: stage, ExplainStep: ExplainStep{Step: u.Feature + " " + u.Name, Text: "cannot be read: " + u.Error(), Warning: true}})
	}
	return out
}
