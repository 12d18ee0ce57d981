"""A homeowners' association: monthly charges and complaints."""
