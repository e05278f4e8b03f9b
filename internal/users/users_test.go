// SPDX-License-Identifier: Apache-2.0

package users

import (
	"slices"
	"testing"
)

func TestFind(t *testing.T) {
	for name, uid := range map[string]uint32{"root": 0, "0": 0, "4000000000": 4000000000} {
		id, err := Find(name)
		if err != nil || id.Credential.Uid != uid || id.Credential.Gid != uid {
			t.Errorf("%s: %+v, %v; want user and group %d", name, id.Credential, err, uid)
		}
	}
	if id, _ := Find("root"); !slices.Contains(id.Env, "USER=root") {
		t.Errorf("root: %q has no USER=root", id.Env)
	}
	for _, name := range []string{"", "no such user", "-1", "4294967296"} {
		if id, err := Find(name); err == nil {
			t.Errorf("%q: %+v, want an error", name, id)
		}
	}
}
