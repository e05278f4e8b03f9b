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

func TestParseStatus(t *testing.T) {
	for status, want := range map[string]uint32{
		"Name:\tx\nUid:\t1000\t0\t0\t0\nGid:\t1000\t0\t0\t0\nGroups:\t5 \nCapPrm:\t000001ffffffffff\n": 1000, // a set-user-ID program
		"Uid:\t0\t1000\t0\t1000\nGid:\t0\t1000\t0\t1000\nGroups:\t \nCapPrm:\t0\n":                     1000, // root has set its effective user
		"Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t\nCapPrm:\t0\n":                                  0,
	} {
		var id Identity
		if err := id.parse(status); err != nil || id.Credential.Uid != want || id.Credential.Gid != want {
			t.Errorf("%q: %+v, %v; want %d", status, id.Credential, err, want)
		}
	}
}

func FuzzParseStatus(f *testing.F) {
	f.Add("Uid:\t1\t1\t1\t1\nGid:\t1\t1\t1\t1\nGroups:\t5 6\nCapPrm:\t0\n")
	f.Add("Uid:\t\nGid:\t1\nGroups:\t-1\nCapPrm:\t0 0\n")
	f.Fuzz(func(t *testing.T, status string) {
		var id Identity
		if err := id.parse(status); err == nil && id.limit == nil {
			t.Errorf("%q: read without a limit of capabilities", status)
		}
	})
}
