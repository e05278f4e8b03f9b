// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"fmt"

	"github.com/weir-project/weir/kernel/instances"
)

// Unreads is implemented by states of features with possibly unreadable instances. An unreadable instance makes the
// feature's up metric 0 and the host unhealthy.
type Unreads interface {
	Unread() instances.Unreadable
}

// UnreadRemedy is the remedy for an unreadable instance.
const UnreadRemedy = "use the version of weir that made it, or remove it with that version"

// UnreadFindings returns doctor's findings about unreadable instances.
func UnreadFindings(all instances.Unreadable) (out []Finding) {
	for _, u := range all.WithoutDamage() {
		out = append(out, Failure(u.Name, "cannot be read: "+u.Error(), UnreadRemedy))
	}
	return out
}

// UnreadSights returns explain's steps about unreadable instances in a packet's network namespace.
func UnreadSights(all instances.Unreadable, p Packet, stage Stage) (out []Verdict) {
	for _, u := range all.In(fmt.Sprint(p.Inode)) {
		out = append(out, Verdict{Stage: stage, ExplainStep: ExplainStep{Step: u.Feature + " " + u.Name, Text: "cannot be read: " + u.Error(), Warning: true}})
	}
	return out
}
